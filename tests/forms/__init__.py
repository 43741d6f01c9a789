"""Programs as people write them: each form, times each op and each kind of user's kernel."""
