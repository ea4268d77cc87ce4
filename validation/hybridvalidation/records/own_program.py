"""The program behind a record that the command's own process makes: without those who asked for it or show it."""

from dataclasses import replace

from hybridvalidation.records.program import Program, current_program, remember_program

_CALLERS = tuple(f"hybridvalidation/{part}" for part in ("cli/", "judge/", "scenario_files.py", "show/"))
"""Read what is asked for, all of it in the record, and tell what came out: they may change, the record still holds."""


def own_program() -> Program:
    """Return ``current_program`` without the command line, its files' readers, judges and tables."""
    program = current_program()
    own = {path: content for path, content in program.files.items() if not path.startswith(_CALLERS)}
    program = replace(program, files=own)
    remember_program(program)
    return program
