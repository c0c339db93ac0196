"""Values that a program hands to an engine and gets back: requests, parameters, results, statistics."""
