"""Code that several roles share: the model that a role trains, and the frozen models that a group hosts."""
