"""How long a sync takes on this machine, beside what the machine can do and beside the loops that others use.

    python -m wsync.bench --case tiny large --transport shm --json -

Engines here are bare receivers: parameters of any shape, and the library's own worker. docs/bench.md says what is
measured against what.
"""
