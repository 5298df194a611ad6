"""The actor service: trains the policy, samples responses, and by default hosts the frozen reference policy."""
