"""The method that suits a model and a text: candidates, their costs, and the choice."""
