//! Tests of atomic files and folders: neighbours stay, a second writer is refused, a kill leaves nothing that matters.

use super::*;

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn dir_with(path: &Path, content: &str) -> AtomicDir {
    let dir = AtomicDir::create(path, "test folder").unwrap();
    fs::write(dir.partial_path().join("file"), content).unwrap();
    dir
}

#[test]
fn a_file_is_whole_or_absent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sub/a.b.json");
    drop(AtomicFile::create(&path).unwrap());
    assert!(names(path.parent().unwrap()).is_empty());
    write_atomic(&path, b"one").unwrap();
    let second = AtomicFile::create(&path).unwrap();
    second.file().write_all(b"two").unwrap();
    assert_eq!(AtomicFile::create(&path).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    assert_eq!(fs::read(&path).unwrap(), b"one");
    second.publish().unwrap();
    assert_eq!((fs::read(&path).unwrap(), names(path.parent().unwrap())), (b"two".to_vec(), vec!["a.b.json".into()]));
    // A longer file that a kill left does not show through.
    fs::write(hidden(&path, PARTIAL), "left behind").unwrap();
    write_atomic(&path, b"3").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"3");
    assert_eq!(AtomicFile::create(folder.path()).unwrap_err().kind(), io::ErrorKind::IsADirectory);
}

/// The part after the last dot is not an ending: `qwen2.5-7b` and `qwen2.5-14b` are two folders, and `qwen.tmp` a third.
#[test]
fn names_with_dots_do_not_meet() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir(at("qwen2.tmp")).unwrap();
    fs::write(at("qwen2.tmp/config.json"), "unrelated").unwrap();
    let (a, b) = (dir_with(&at("qwen2.5-7b"), "a"), dir_with(&at("qwen2.5-14b"), "b"));
    assert_eq!(AtomicDir::create(&at("qwen2.5-7b"), "test folder").unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    a.publish().unwrap();
    b.publish().unwrap();
    assert_eq!(names(root.path()), ["qwen2.5-14b", "qwen2.5-7b", "qwen2.tmp"]);
    assert_eq!(fs::read_to_string(at("qwen2.5-7b/file")).unwrap(), "a");
    assert_eq!(fs::read_to_string(at("qwen2.tmp/config.json")).unwrap(), "unrelated");
}

#[test]
fn a_replaced_folder_is_there_at_every_moment() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("export");
    dir_with(&path, "one").publish().unwrap();
    let second = dir_with(&path, "two");
    assert_eq!(fs::read_to_string(path.join("file")).unwrap(), "one");
    second.publish().unwrap();
    assert_eq!(
        (fs::read_to_string(path.join("file")).unwrap(), names(root.path())),
        ("two".into(), vec!["export".into()])
    );
    // Without the exchange a kill may come between the two renames: then the old one is put back.
    fs::rename(&path, hidden(&path, OLD)).unwrap();
    drop(AtomicDir::create(&path, "test folder").unwrap());
    assert_eq!(
        (fs::read_to_string(path.join("file")).unwrap(), names(root.path())),
        ("two".into(), vec!["export".into()])
    );
}

#[test]
fn what_a_kill_left_is_removed_but_not_what_is_being_written() {
    let root = tempfile::tempdir().unwrap();
    let (left, live) = (root.path().join("left"), root.path().join("live"));
    std::mem::forget(dir_with(&left, "half"));
    // Forgetting keeps the lock until the process ends; a killed process has released it.
    let folder = hidden(&left, PARTIAL);
    fs::remove_dir_all(&folder).unwrap();
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("other"), "half").unwrap();
    let written = dir_with(&live, "half");
    assert_eq!(remove_partial_dirs(root.path()).unwrap(), 1);
    written.publish().unwrap();
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("other"), "half").unwrap();
    dir_with(&left, "whole").publish().unwrap();
    assert_eq!((names(root.path()), names(&left)), (vec!["left".into(), "live".into()], vec!["file".to_owned()]));
}

#[test]
fn a_link_is_followed_and_a_file_is_no_folder() {
    let root = tempfile::tempdir().unwrap();
    let (real, link) = (root.path().join("real"), root.path().join("link"));
    dir_with(&real, "one").publish().unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    dir_with(&link, "two").publish().unwrap();
    assert_eq!(fs::read_to_string(real.join("file")).unwrap(), "two");
    assert!(link.is_symlink());
    let file = root.path().join("plain");
    fs::write(&file, "").unwrap();
    assert_eq!(AtomicDir::create(&file, "test folder").unwrap_err().kind(), io::ErrorKind::NotADirectory);
}

/// Issue 17, E14.
#[test]
fn e14_inputs_are_regular_and_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let pipe = CString::new(path("pipe").as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    for special in [path("pipe"), "/dev/zero".into(), "/dev/null".into()] {
        assert_eq!(read_input(&special, 10).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{}", special.display());
    }
    assert_eq!(read_input(folder.path(), 10).unwrap_err().kind(), io::ErrorKind::IsADirectory);
    fs::write(path("file"), "0123456789").unwrap();
    assert_eq!(read_input(&path("file"), 10).unwrap(), b"0123456789");
    assert_eq!(read_input(&path("file"), 9).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    assert_eq!(read_input(&path("none"), 9).unwrap_err().kind(), io::ErrorKind::NotFound);
    fs::write(path("file"), b"\xff").unwrap();
    assert_eq!(read_input_text(&path("file"), 9).unwrap_err().kind(), io::ErrorKind::InvalidData);
}

/// Issue 17, E16.
#[test]
fn e16_errors_have_a_remedy() {
    let remedy = |code| read_remedy(&io::Error::from_raw_os_error(code));
    assert!(remedy(libc::EMFILE).contains("ulimit -n") && remedy(libc::EACCES).contains("readable"));
    assert!(remedy(libc::EIO).contains("disk") && remedy(libc::EFBIG).contains("ulimit -f"));
    let folder = tempfile::tempdir().unwrap();
    creatable(&folder.path().join("a/b/c")).unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    assert_eq!(creatable(&folder.path().join("file/b")).unwrap_err().0, folder.path().join("file"));
}
