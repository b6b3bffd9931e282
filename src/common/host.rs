//! Limits of the machine: the memory that this process may take, and free space on a disk.

use std::{ffi::CString, fs, os::unix::ffi::OsStrExt, path::Path};

/// Memory that this process may take, in bytes: the tightest limit of its control groups, else what the machine has.
pub fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = group_limits(Path::new("/sys/fs/cgroup"), &groups);
    limits.into_iter().chain(machine_memory()).min()
}

/// Room for ordinary users on the disk that holds `path`, or will hold it.
pub fn free_disk(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let existing = path.ancestors().find(|path| path.exists())?;
    let name = CString::new(existing.as_os_str().as_bytes()).ok()?;
    // SAFETY: `name` is a string that ends in NUL, and a statvfs of zeros is a valid value for the call to overwrite.
    let (result, stat) = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(name.as_ptr(), &mut stat), stat)
    };
    (result == 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Memory of the host in bytes, as Linux tells it.
pub fn machine_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The limits of the groups in `groups` (/proc/self/cgroup) and of all above them, whichever version they are of.
fn group_limits(root: &Path, groups: &str) -> Vec<u64> {
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            // "max", or no such file: no limit here.
            let limit = fs::read_to_string(root.join(group).join(file)).unwrap_or_default();
            limits.extend(limit.trim().parse::<u64>().ok());
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_counts_in_both_versions() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("a/memory.max", "5000\n");
        write("a/b/memory.max", "max\n");
        write("memory/c/memory.limit_in_bytes", "700\n");
        assert_eq!(group_limits(root.path(), "0::/a/b\n"), [5000]);
        assert_eq!(group_limits(root.path(), "9:cpu,memory:/c\n1:name=systemd:/x\n0::/none\n"), [700]);
        assert!(group_limits(root.path(), "").is_empty());
    }
}
