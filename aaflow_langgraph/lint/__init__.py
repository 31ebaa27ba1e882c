"""``aaflow lint``: renders the prompts of an app twice and says what keeps them from being append-only."""
