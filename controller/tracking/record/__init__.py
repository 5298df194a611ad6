"""Records what a run did, for people and the browser view: rollouts with tokens, events, and what runs now."""
