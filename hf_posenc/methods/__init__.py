"""The methods: closed forms, options, and how each is written to config.json."""
