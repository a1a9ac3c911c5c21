"""Rules fitted to a model: a divisor for each slow pair of features, and one temperature, with all weights frozen."""
