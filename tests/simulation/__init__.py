"""A deterministic simulation of the worker pool: one number is one history of requests, results and faults.

    schedule.py    a history: the caller's calls, drawn from its number, and the checks of what they return
    backend.py     the scheduler: workers of which one runs at a time, and a virtual clock
    simulator.py   the environment that workers step; it stops at points, where the scheduler decides
    model.py       what each result must be, from what the environments have done; it shares no code with the package
    episodes.py    what the statistics of episodes must be
    seeds.py       what the seeds of constructors and resets must be
    shrinking.py   fewer calls and faults that still fail
    __main__.py    many histories, in any number of processes; it can be interrupted and goes on

See "Simulate the worker pool" in `docs/contributing.md`.
"""
