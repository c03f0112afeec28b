"""The coordinator's services on the wire: messages in, scheduler asked, messages out. Decides nothing."""
