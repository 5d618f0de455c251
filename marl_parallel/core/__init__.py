"""The core of all backends: messages, the worker, the meaning of a transition, shared memory and the worker pool."""
