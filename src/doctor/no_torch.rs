//! Device examination in a build without libtorch: a warning.

use super::Report;

/// Warns that no device was tested.
pub fn examine(report: &mut Report) {
    report.warn(
        "libtorch",
        "this draftmill was built without libtorch: no device was tested, and only run.engine = \"simulated\" works",
        "build with the default features",
    );
}
