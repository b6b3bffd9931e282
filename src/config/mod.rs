//! Configuration: the wire type, the resolved type and the checks between them.
