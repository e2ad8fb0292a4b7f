"""Which workers serve a request, by what they hold and how busy they are."""
