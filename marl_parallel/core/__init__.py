"""How environments run, whoever hosts them: messages, the worker, the meaning of a transition, memory, the pool."""
