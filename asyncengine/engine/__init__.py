"""AsyncEngine and its parts. engine.py has its methods, life.py its backend and health, submission.py the way of
requests into the core, stream.py their way out; constraints/ has grammars and logits processors."""
