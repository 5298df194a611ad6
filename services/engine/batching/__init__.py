"""The division of rows into micro-batches and optimizer steps, and the weight of each token in the loss."""
