//! Target, drafter, loss and optimizer in tch.
