"""The critic service: computes values of states, and trains the value model with the value loss."""
