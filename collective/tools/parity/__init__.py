"""``collective parity``: one call, one result, in any framework on any transport."""
