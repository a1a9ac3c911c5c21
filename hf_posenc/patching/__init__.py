"""Changing the rotary embedding of a loaded model, verified and undoable."""
