"""Every storage and op of a run, counted: ledgers, traces, and the rules that ops follow."""
