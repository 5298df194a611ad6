"""The chat endpoint by which agent programs talk with the policy: HTTP on one side, a `Chat` on the other."""
