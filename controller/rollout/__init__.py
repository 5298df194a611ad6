"""What is made of a step's prompts: streamed responses, their scores, validation."""
