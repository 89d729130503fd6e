"""Loading models and the one hook into Hugging Face models."""
