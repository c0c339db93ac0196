"""Exchange between GPUs that hold a model together, through each other's memory."""
