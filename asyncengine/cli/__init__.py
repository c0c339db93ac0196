"""The ``asyncengine`` command."""
