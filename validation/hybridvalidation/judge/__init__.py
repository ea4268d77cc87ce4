"""From records to verdicts on stated figures."""
