"""One file for each trainer of others: ``plan(common, config, card)`` builds it and returns figures in bytes."""
