"""Triax under load: many threads, kernels and processes, interrupts, little memory, full disks.

`make stress`, or ``python -m tests.stress``; docs/checking.md says what each scenario does.
"""
