"""`python -m tests.hostile --artefacts N --seed S`: so many mutants of a seed, and how they ended."""

import argparse
import secrets
import sys

from tests.hostile.artefact_run import WRONG, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--artefacts", type=int, default=1000, metavar="N", help="mutants of saved results")
    parser.add_argument("--seed", type=int, default=None, help="a fresh one if it is left out")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant, to see one again")
    asked = parser.parse_args()
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    tally = run(asked.artefacts, seed, asked.first)
    print(tally)
    for wrong in tally.wrong[:50]:
        print(f"  {wrong}")
    return 1 if tally.counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
