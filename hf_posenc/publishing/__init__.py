"""The model card of an extended model, and its repository on the Hugging Face Hub."""
