//! Machine limits: the memory limit of this process, and free disk space.

use std::{ffi::CString, fs, os::unix::ffi::OsStrExt, path::Path};

/// Memory limit of this process in bytes: the lowest limit of its control groups, at most the machine's memory.
pub fn memory_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = group_limits(Path::new("/sys/fs/cgroup"), &groups);
    limits.into_iter().chain(machine_memory()).min()
}

/// Cores that this process may use; 1 if unknown.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Free bytes for ordinary users on the disk of `path`, which need not exist.
pub fn free_disk(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let existing = path.ancestors().find(|path| path.exists())?;
    let name = CString::new(existing.as_os_str().as_bytes()).ok()?;
    // SAFETY: `name` is NUL-terminated, and a zeroed statvfs is a valid value for the call to overwrite.
    let (result, stat) = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(name.as_ptr(), &mut stat), stat)
    };
    (result == 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Memory of the machine in bytes (`MemTotal`).
pub fn machine_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Memory limits of the control groups in `groups` (/proc/self/cgroup) and of their ancestors, versions 1 and 2.
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
            // `max` or a missing file means no limit.
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
    fn limits_of_both_cgroup_versions_are_read() {
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
