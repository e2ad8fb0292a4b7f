"""What publishers and readers of KV events share: the format, CURVE keys, NATS, a thread's mailbox."""
