"""``collective parity``: one call has one result, in any framework on any transport."""
