"""Which method suits a model and a text: candidates, what they cost, and which to take."""
