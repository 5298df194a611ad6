"""The ways in which the ranks of a group hold a model and add up its gradients (`actor.strategy`)."""
