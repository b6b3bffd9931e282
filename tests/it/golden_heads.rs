//! Parity of draft heads and losses with independent implementations: the numbers under `tests/golden-heads`. Shapes,
//! settings and numbers are read from the files, so `DRAFTMILL_GOLDEN_HEADS` may name any folder of the same layout.

mod case;
mod dflash2;
mod dspark;
mod eal;
mod layouts;
mod losses;
mod muon;
mod sliding;
