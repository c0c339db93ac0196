"""The engine inside systems that serve on many machines. Each module needs the extra of its name."""
