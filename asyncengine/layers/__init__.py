"""Parts that the models share."""
