"""What every facade promises: a table of tests, with one row for each facade.

- `games`: scripted simulators; a table says when each agent is born, dies, and comes back.
- `loop`: a plain loop over one game. It knows what happened in each step, and shares no code with the package.
- `driver`: how a test talks to a facade, and how the facade shows what happened.
- `table`: the promises, one test each. A test file has a class for each facade: `class TestX(Promises): driver = X()`.

A new facade writes a `Driver`. Where it must break a promise, the driver says so by an attribute or a method with the
reason, and the table tests what it does instead.
"""
