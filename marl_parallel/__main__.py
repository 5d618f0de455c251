"""`python -m marl_parallel`: the same as the console script `marl-parallel`."""

from marl_parallel.cli import main

if __name__ == "__main__":
    main()
