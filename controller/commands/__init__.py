"""The commands of `python -m controller` beside training: translating verl runs, predicting steps, examining a run."""
