"""Actor, critic and controller in pods of their own, on Kubernetes."""
