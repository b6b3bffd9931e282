-- The tables of state.db, version 1. Times are milliseconds since 1970, UTC.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,  -- schema_version, and identity.NAME for each part of the run's identity
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE plans (
    epoch  INTEGER PRIMARY KEY,
    jobs   INTEGER NOT NULL,
    bounds TEXT    NOT NULL,  -- JSON: longest sample of each bucket
    time   INTEGER NOT NULL
) STRICT;

CREATE TABLE jobs (
    epoch   INTEGER NOT NULL REFERENCES plans,
    idx     INTEGER NOT NULL,  -- place in the epoch's order
    bucket  INTEGER NOT NULL,
    tokens  INTEGER NOT NULL,
    width   INTEGER NOT NULL,
    samples TEXT    NOT NULL,  -- JSON: indices in the prepared store
    PRIMARY KEY (epoch, idx)
) STRICT;

CREATE TABLE outcomes (
    epoch      INTEGER NOT NULL,
    idx        INTEGER NOT NULL,
    step       INTEGER,           -- of a trained job
    reason     TEXT,              -- of a skipped job
    attempts   INTEGER,           -- of a skipped job
    checkpoint INTEGER NOT NULL,  -- step of the newest checkpoint when this was recorded, 0 before the first
    PRIMARY KEY (epoch, idx),
    FOREIGN KEY (epoch, idx) REFERENCES jobs,
    CHECK ((step IS NULL) = (reason IS NOT NULL)),
    CHECK ((reason IS NULL) = (attempts IS NULL))
) STRICT, WITHOUT ROWID;

CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY,
    name TEXT    NOT NULL,
    time INTEGER NOT NULL
) STRICT;

CREATE TABLE events (
    id   INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    kind TEXT    NOT NULL,
    text TEXT    NOT NULL
) STRICT;
