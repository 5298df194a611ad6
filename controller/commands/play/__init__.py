"""One conversation with an environment, by hand or by the model, to see what the environment does before a run."""
