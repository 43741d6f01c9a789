"""Draws random placements and counts what becomes of them.

python -m tests.moe.placements --cases 1000 --seed 7     # by op; refusals by message
python -m tests.moe.placements --seed 7 --case 123       # one of them, with all its placements
"""

from tests.moe.placements import many

if __name__ == "__main__":
    many.main()
