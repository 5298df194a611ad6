"""The quickstart: PPO teaches a small model to sort the letters of a word, on a CPU."""
