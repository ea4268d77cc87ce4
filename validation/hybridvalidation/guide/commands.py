"""The command reference, from the help of the command itself."""

import re

from hybridtrain.cli.main import APP, EXIT_CODES

_VERB = re.compile(r"^## hybridtrain (\S+)$", re.MULTILINE)


def commands() -> str:
    """Return what ``hybridtrain VERB --help`` says of every verb, as Markdown."""
    text = APP.generate_docs(output_format="markdown", heading_level=1, max_heading_level=2, usage_name="hybridtrain")
    first = _VERB.search(text)
    assert first is not None, "the help has verbs"
    return f"{EXIT_CODES}\n\n{text[first.start() :]}"
