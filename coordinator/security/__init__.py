"""Who is let in: the certificate authority, join tokens, users, revocation, and the log of who did what."""
