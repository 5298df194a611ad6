"""SAO on guess_number: single rollouts that older weights sampled, and a critic that learns faster than the policy."""
